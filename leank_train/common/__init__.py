"""What training and evaluation share: files that appear whole, checked settings, escaping, the bootstrap."""
