# In this checkout only, whose own tests leave the installed plugin out: coverage is to see it imported.
pytest_plugins = ["gradsurgeon.integrations.pytest_plugin"]
