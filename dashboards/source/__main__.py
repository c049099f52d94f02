"""Write the JSON of every dashboard beside this package."""

from dashboards.source.files import written

for path, text in written():
    path.write_text(text)
