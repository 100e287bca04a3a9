"""A report of runs: their folders read as they are, made into one document for the page, into pictures, or into Markdown."""
