"""The name under which rematerialisation finds the results of products that are no plain `dot`."""

# Rematerialisation recognises a plain product by its primitive. Products of sorted rows, or with kernels that are
# unpacked or made on the way, are loops or a platform's own kernels and need a name.
PRODUCT = "kernel_product"
