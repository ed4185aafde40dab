"""A browser for the tests of images on the page."""

from browsers import browser  # noqa: F401 - a fixture
