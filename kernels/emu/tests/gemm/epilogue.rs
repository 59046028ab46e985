//! Every epilogue, in both formats.
