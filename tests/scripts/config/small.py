# Read by `configured.py`: overrides its globals.
width = 12
learning_rate = 5e-2
activation = nn.SiLU()
