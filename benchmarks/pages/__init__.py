"""Figures on the pages: every one is computed from the records, and put where it belongs.

python -m benchmarks.pages           what the pages say, and what the records say where it is something else
python -m benchmarks.pages --write   puts the records' figures into the pages

Words are nobody's but the author's: after new records read what stands around the figures that moved. Fails where a
figure is not the record's, where a sentence or a table is gone, and where a claim that has no figure does not hold.
"""
