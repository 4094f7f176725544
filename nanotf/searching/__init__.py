"""`nanotf.search`: hyperparameters of a Keras model, with Optuna, on workers of `nanotf.map`."""
