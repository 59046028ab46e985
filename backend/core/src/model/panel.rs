//! Packed weights: the one file that knows their bytes.
