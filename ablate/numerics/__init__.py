"""What a low-precision product computes, to the bit. It knows torch and nothing else: no layers, no models, no YAML."""
