"""`faser bench WHAT …`: measuring, in this process."""
