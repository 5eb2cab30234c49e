"""How a NumPy reference walks a large array: in pieces that stay in a core's cache."""

# Elements of a piece: few enough for the cache, many enough that the calls themselves cost little.
BLOCK_ELEMENTS = 65536


def row_blocks(num_rows: int, row_size: int) -> list[slice]:
    """Slices of whole rows, of about BLOCK_ELEMENTS elements each."""
    rows = max(1, BLOCK_ELEMENTS // row_size)
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]
