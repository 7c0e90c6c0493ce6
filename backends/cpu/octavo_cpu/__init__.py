"""A CPU backend: the decoding loop in C++, built on first use by the compiler that the machine has."""
