"""The engines that `chatpage bench` runs beside each other, one small adapter each, behind one interface (`interface.py`)."""
