"""Three sentences, their vectors and how alike they are."""

from embed import Embed

SENTENCES = [
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in the sun by the window.",
    "Interest rates were raised for the third time this year.",
]

with Embed.open("minilm") as engine:
    vectors = engine.encode(SENTENCES)
    similarities = vectors @ vectors.T  # the vectors have length 1
    print(f"{engine.name}, {engine.dim} numbers a vector, on {engine.device_name}")

for index, sentence in enumerate(SENTENCES):
    print("  ".join(f"{similarity:6.3f}" for similarity in similarities[index]), "", sentence)
