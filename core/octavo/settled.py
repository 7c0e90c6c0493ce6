"""What a process does once all that it keeps is there, before it serves."""

import gc


def settle() -> None:
    """From now on the garbage collector leaves what is there alone, and looks at what comes later.

    PyTorch, transformers and the rest are hundreds of thousands of objects that stay. They would be looked through in
    the middle of a step or of an answer.
    """
    gc.collect()
    gc.freeze()
