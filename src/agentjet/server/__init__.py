"""The server: its runs, training, checkpoints, reading, health, control routes and the page's routes. Imports no torch.

runs = Runs(config, compute)
app = create_app(runs, Keys.open(data_dir))
await runs.start()
"""
