"""What tests of other libraries' trainers share."""

from tests.outside.conftest import quiet_trainers as quiet_trainers
