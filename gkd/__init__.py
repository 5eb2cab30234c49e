"""gkd: the device layer and the operators that the engines are wired from."""
