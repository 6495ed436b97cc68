"""The embedded voice: a cascade of small models behind the duplex contract, all on the CPU, all from ordinary packages."""
