"""Stage two: replay a cache into a block-diffusion drafter, and compare the runs."""
