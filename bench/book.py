"""A text to train on that needs no download: the same words each time."""
import random


def write_book(path, size):
    """At least `size` bytes of words."""
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 8))) for _ in range(500)]
    path.write_text(" ".join(source.choices(words, k=size // 3 + 1)))
