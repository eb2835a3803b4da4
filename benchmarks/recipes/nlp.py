"""A text classifier in the manner of Accelerate's NLP example: collated batches, a warm-up, gathered metrics."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

epochs, batch, warm_up = 3, 16, 10
accelerator = Accelerator(cpu=not torch.cuda.is_available())
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(3, 9, (260,), generator=generator).tolist()
texts = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]
samples = [(words, int(words.float().mean() > 25)) for words in texts]


def collate(rows):
    return pad_sequence([words for words, _ in rows], batch_first=True), torch.tensor([label for _, label in rows])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.label = nn.EmbeddingBag(50, 16, padding_idx=0), nn.Linear(16, 2)

    def forward(self, words):
        return self.label(self.words(words))


torch.manual_seed(42)
train_loader = DataLoader(samples[:200], batch, shuffle=True, collate_fn=collate)
test_loader = DataLoader(samples[200:], batch, collate_fn=collate)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
total = epochs * len(train_loader)
scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / warm_up, max(0.0, (total - step) / (total - warm_up))))
model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, test_loader, scheduler
)

for epoch in range(epochs):
    model.train()
    for words, labels in train_loader:
        loss = nn.functional.cross_entropy(model(words), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    right = []
    for words, labels in test_loader:
        with torch.no_grad():
            guesses = model(words).argmax(1)
        right.append(accelerator.gather_for_metrics(guesses == labels))
    accelerator.print(f"epoch {epoch}: accuracy {torch.cat(right).float().mean():.3f}", flush=True)
