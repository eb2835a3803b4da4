"""Draws the picture of docs/architecture.md: python docs/rooms.py >docs/img/rooms.svg"""

from __future__ import annotations

WIDTH, HEIGHT = 920, 400
BOX = '<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="#37474f"/>'
WORDS = '<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="#102027">{words}</text>'
LINE = '<path d="{path}" fill="none" stroke="#37474f" stroke-width="1.5" marker-end="url(#head)"/>'
HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#37474f"/></marker></defs>'
)
ROOMS = {
    "observe": "reads and checks",
    "learn": "speed, efficiency",
    "rules": "who may, how far",
    "decide": "the policy",
    "act": "the resize",
}
PASSED = ["snapshot", "models", "views", "schedule"]


def box(x: int, y: int, w: int, h: int, title: str, below: str, fill: str) -> list[str]:
    """A box with a title and a line below it."""
    middle = x + w // 2
    return [
        BOX.format(x=x, y=y, w=w, h=h, fill=fill),
        WORDS.format(x=middle, y=y + h // 2 - 4, anchor="middle", size=16, words=title),
        WORDS.format(x=middle, y=y + h // 2 + 15, anchor="middle", size=12, words=below),
    ]


def words(x: int, y: int, text: str, anchor: str = "start") -> str:
    """A label of an arrow."""
    return WORDS.format(x=x, y=y, anchor=anchor, size=12, words=text)


def picture() -> str:
    """The SVG: Slurm above, the steps of a tick in a row, the job database and the job below."""
    lines = [HEAD]
    lines += box(20, 10, 880, 50, "Slurm", "starts each job at the shape that it has now", "#eceff1")
    for number, (room, below) in enumerate(ROOMS.items()):
        x = 20 + number * 188
        lines += box(x, 130, 128, 60, room, below, "#e3f2fd")
        if number:
            lines.append(LINE.format(path=f"M{x - 60} 160H{x - 2}"))
            lines.append(words(x - 30, 150, PASSED[number - 1], "middle"))
    lines += box(210, 240, 500, 50, "job database (ones_db)", "runs, throughput, decisions, resizes", "#fff8e1")
    lines += box(
        20, 340, 880, 50, "job: ones_wrapper in the training script", "files in the job's directory", "#e8f5e9"
    )
    for path, x, y, label, anchor in (
        ("M84 60V128", 92, 98, "queue, nodes", "start"),
        ("M836 130V62", 828, 98, "requeue, reshape, release", "end"),
        ("M60 340V192", 68, 320, "reports", "start"),
        ("M870 190V338", 862, 320, "orders", "end"),
        ("M120 190V265H208", 128, 232, "stored", "start"),
        ("M800 190V265H712", 792, 232, "each state", "end"),
        ("M272 240V192", 280, 220, "histories", "start"),
    ):
        lines += [LINE.format(path=path), words(x, y, label, anchor)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    white = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, white, *lines, "</svg>", ""])


if __name__ == "__main__":
    print(picture(), end="")
