// A few neighbouring elements that move between memories in one instruction: up to 16 bytes, aligned to their size.
#pragma once

template <class Element, int SIZE>
struct alignas(sizeof(Element) * SIZE) Vector {
    Element values[SIZE];
};

template <int SIZE, class Element>
__device__ __forceinline__ Vector<Element, SIZE> load_vector(const Element* address) {
    return *reinterpret_cast<const Vector<Element, SIZE>*>(address);
}

template <int SIZE, class Element>
__device__ __forceinline__ void store_vector(Element* address, const Vector<Element, SIZE>& vector) {
    *reinterpret_cast<Vector<Element, SIZE>*>(address) = vector;
}
