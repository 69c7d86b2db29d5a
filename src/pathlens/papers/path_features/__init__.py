"""Experiments of 'Neural Path Features and Neural Path Kernel'."""
