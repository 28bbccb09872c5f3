"""The name by which rematerialisation knows what a product has computed."""

# It knows a plain product by its primitive. Products of sorted rows, or with kernels that are unpacked or made on the
# way, are loops or a platform's own kernels.
PRODUCT = "kernel_product"
