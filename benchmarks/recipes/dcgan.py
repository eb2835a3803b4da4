"""A GAN in the manner of DCGAN: two networks and two optimizers in turns, two backward passes of one of them a step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

epochs, batch, latent = 3, 16, 8
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(999)
random = torch.Generator().manual_seed(0)
images = torch.rand(200, 1, 8, 8, generator=random).round() * 2 - 1
loader = DataLoader(TensorDataset(images), batch, shuffle=True)

G = nn.Sequential(
    nn.ConvTranspose2d(latent, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, 2), nn.Tanh()
).to(device)
D = nn.Sequential(
    nn.Conv2d(1, 8, 2, 2), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(0.2), nn.Flatten(),
    nn.Linear(32, 1), nn.Sigmoid(),
).to(device)  # fmt: skip
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
fixed = torch.randn(4, latent, 1, 1, device=device)

for epoch in range(epochs):
    for (real,) in loader:
        # The critic: real images, then made ones.
        optimizer_d.zero_grad()
        truth = torch.full((len(real), 1), 1.0, device=device)
        error_real = criterion(D(real.to(device)), truth)
        error_real.backward()
        made = G(torch.randn(len(real), latent, 1, 1, device=device))
        error_made = criterion(D(made.detach()), torch.zeros_like(truth))
        error_made.backward()
        optimizer_d.step()
        # The maker.
        optimizer_g.zero_grad()
        error_g = criterion(D(made), truth)
        error_g.backward()
        optimizer_g.step()
    print(f"epoch {epoch}: {error_real + error_made:.3f}, {error_g:.3f}", flush=True)
    torch.save(G(fixed).detach(), "samples.pt")
