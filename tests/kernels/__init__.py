"""Tests of faser.kernels."""
