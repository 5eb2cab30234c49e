"""Programs for this repository's developers; nothing that is installed imports them."""
