"""The accuracy gate and its report."""
