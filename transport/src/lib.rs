//! Moves bytes between registered memory.
