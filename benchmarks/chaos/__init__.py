"""Ten minutes of what a public network does to a server, and of what an operator fears: see __main__.py."""
