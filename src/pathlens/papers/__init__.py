"""The reproduction of the papers: experiments with claims, checks of theorems, artifacts and pages.

One folder per paper, one file per experiment; `pathlens.papers.experiment` finds them. This package imports the
library; the library never imports this package.
"""

#: first word of an experiment's name → title of the paper, in the order of lists and pages
PAPERS = {
    "hs": "Half-Space Feature Learning",
    "dgn": "Deep Gated Networks",
    "npk": "Neural Path Features",
    "loc": "Gated Deep Linear Networks and Localisation",
    "beyond": "Beyond the papers",
}
