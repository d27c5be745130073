"""One device a file. Each has `open_meter(argument)`, which reads the device once or says why it cannot."""
