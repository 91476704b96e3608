"""Programs of other clients against a server: each runs in the environment that `make clients` installs."""
