"""Parts of `python -m bench.face`: a long run, its server, agents, viewers, a browser and the checks of the page."""
