"""What a process does once all that it keeps is there, before it serves."""

import gc


def settle() -> None:
    """Leave what is there now to itself: the garbage collector looks at what comes later alone.

    PyTorch, transformers and the rest are some 400,000 objects that stay. To look through them takes 0.2 s, in the
    middle of a step or of an answer, and their number is what the collector goes by when it decides to.
    """
    gc.collect()
    gc.freeze()
