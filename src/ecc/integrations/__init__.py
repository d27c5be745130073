"""Room 8: ECC in the training programs that people have. Each file needs its library; nothing else imports them."""
