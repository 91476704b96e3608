"""What commands print while they work. Knows no command."""
