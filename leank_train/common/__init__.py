"""What training and evaluation share: whole files, checked settings, the decoder's shape, escaping, the bootstrap."""
