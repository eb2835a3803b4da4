"""`python -m ones_wrapper.launch` is `ones-run`."""

import sys

from ones_wrapper.launch import main

sys.exit(main())
