"""What serving costs and gains: default flags against off, steps against another checkout, and the host's part."""
