"""What pytest gives to a test, by shorter names."""

import pytest

Printed = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
