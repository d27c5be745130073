"""ECC in other training libraries. Each file needs its library; nothing else imports them."""
