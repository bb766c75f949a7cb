"""Property tests judge answers, not the time that a busy machine takes to draw inputs."""

from hypothesis import HealthCheck, settings

settings.register_profile("tests", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
