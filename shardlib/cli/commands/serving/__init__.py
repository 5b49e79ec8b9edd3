"""The commands of models that answer: `planning` (`plan --serve`), `generating`, `exporting`,
`serve`, `bench`, `edge`.
"""
