# libweightwire_cuda.so: kernels/cuda.h and nothing else is visible; the CUDA runtime is inside, the
# driver is looked for when a call needs it.
set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100")
set(CMAKE_CUDA_STANDARD 17)  # CMake 3.25.1 refuses 20 with nvcc 13
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
if(CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

add_library(weightwire_cuda SHARED cuda_abi.cc cuda_call.cc cuda_memory.cc cuda_kernels.cu
            cuda_delta.cu)
target_link_libraries(weightwire_cuda PRIVATE weightwire_flags weightwire_kernels CUDA::cudart_static)
target_include_directories(weightwire_cuda SYSTEM PRIVATE ${XXHASH_INCLUDE_DIR})
target_link_options(weightwire_cuda PRIVATE -Wl,--no-undefined
                    -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/cuda.map)
# Division, denormals and sums of products as on the CPU. Of the host's functions device code may call
# those that are constexpr; of others nvcc would only warn, and make what is not defined.
target_compile_options(weightwire_cuda PRIVATE
                       "$<$<COMPILE_LANGUAGE:CUDA>:-prec-div=true;-ftz=false;-fmad=false>"
                       "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Werror=cross-execution-space-call>")
set_target_properties(weightwire_cuda PROPERTIES
                      CUDA_RUNTIME_LIBRARY Static LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cuda.map
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
