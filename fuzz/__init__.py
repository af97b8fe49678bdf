"""Coverage-guided fuzzing of everything that reads bytes from elsewhere.

`python -m fuzz.run` drives every target with atheris; the tests replay the corpus and drive the
same functions with hypothesis. `python -m fuzz.seeds` writes the seeds again.
"""
