"""Tables, charts and HTML pages, made from the files and results of runs."""
