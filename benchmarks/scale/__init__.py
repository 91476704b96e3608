"""What more than one engine, and more than one process, costs and brings."""
