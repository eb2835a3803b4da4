"""How much two colours differ for people, by CIEDE2000 (Sharma, Wu, Dalal 2005), with and without all cones.

Sight without red or green cones is that of Machado, Oliveira and Fernandes (2009) at full severity.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SIGHTS = {
    "normal": np.eye(3),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def linear(colour: str) -> Floats:
    """Linear red, green and blue of `#rrggbb`."""
    part = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    found: Floats = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return found


def lab(rgb: Floats) -> Floats:
    """CIELAB of linear red, green and blue, white being that of sRGB."""
    part = np.clip(rgb, 0, 1) @ XYZ.T / XYZ.sum(axis=1)
    x, y, z = np.where(part > 216 / 24389, np.cbrt(part), (24389 / 27 * part + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one: str, other: str, sight: str) -> float:
    """CIEDE2000 of two colours `#rrggbb` for this sight, or in `grey`."""
    if sight == "grey":
        return ciede2000(*(lab(np.full(3, linear(colour) @ XYZ[1])) for colour in (one, other)))
    return ciede2000(*(lab(SIGHTS[sight] @ linear(colour)) for colour in (one, other)))


def ciede2000(one: Floats, other: Floats) -> float:
    """The difference of two colours in CIELAB; the least that people see is about 1."""
    chroma = (np.hypot(*one[1:]) + np.hypot(*other[1:])) / 2
    stretch = 1.5 - 0.5 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    (l1, a1, b1), (l2, a2, b2) = one, other
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * stretch)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = h1 + turn / 2 if c1 * c2 else h1 + h2
    light, mean = (l1 + l2) / 2, (c1 + c2) / 2
    cosine = [np.cos(np.radians(k * hue - at)) for k, at in ((1, 30), (2, 0), (3, -6), (4, 63))]
    weight = 1 - 0.17 * cosine[0] + 0.24 * cosine[1] + 0.32 * cosine[2] - 0.20 * cosine[3]
    s_l = 1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2)
    s_c, s_h = 1 + 0.045 * mean, 1 + 0.015 * mean * weight
    bend = -2 * np.sqrt(mean**7 / (mean**7 + 25.0**7))
    bend *= np.sin(np.radians(60 * np.exp(-((((hue % 360) - 275) / 25) ** 2))))
    d_l, d_c, d_h = (l2 - l1) / s_l, (c2 - c1) / s_c, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / s_h
    return float(np.sqrt(d_l**2 + d_c**2 + d_h**2 + bend * d_c * d_h))
