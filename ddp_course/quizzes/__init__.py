"""The questions of each lesson: quiz.ask("06") asks those in `q06.QUESTIONS`."""
