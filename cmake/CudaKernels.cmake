# df_find_cuda(NOTE): finds nvcc, its headers and the static CUDA runtime, and tries them. NOTE is "" or why not.
# Sets df_nvcc, df_nvcc_flags, df_cuda_include, df_cudart.
#
# nvcc is called by its own rules and not through CMake's CUDA language: the compiler from the nvidia-cuda-nvcc wheels has
# a layout that CMake does not link with, and architectures such as 90a need exactly one -gencode each.
function(df_find_nvcc out)
  set(names "")
  if(DELTAFUSE_NVCC)
    set(${out} "${DELTAFUSE_NVCC}" PARENT_SCOPE)
    return()
  endif()
  list(APPEND names "$ENV{CUDACXX}")
  foreach(root IN ITEMS "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
    if(root)
      list(APPEND names "${root}/bin/nvcc")
    endif()
  endforeach()
  unset(path_nvcc CACHE)
  find_program(path_nvcc nvcc)
  if(path_nvcc)
    list(APPEND names "${path_nvcc}")
  endif()
  unset(path_nvcc CACHE)
  list(APPEND names /usr/local/cuda/bin/nvcc)
  # The wheels: nvidia/cu13/bin/nvcc in the environment that is being installed into.
  find_package(Python COMPONENTS Interpreter QUIET)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])"
      OUTPUT_VARIABLE site OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    file(GLOB wheels "${site}/nvidia/cu*/bin/nvcc")
    list(SORT wheels COMPARE NATURAL ORDER DESCENDING)
    list(APPEND names ${wheels})
  endif()
  set(${out} "" PARENT_SCOPE)
  foreach(name IN LISTS names)
    if(name AND EXISTS "${name}")
      set(${out} "${name}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(df_find_cuda note)
  if(NOT DELTAFUSE_CUDA)
    set(${note} "they were switched off (DELTAFUSE_CUDA=OFF)" PARENT_SCOPE)
    return()
  endif()
  df_find_nvcc(nvcc)
  if(NOT nvcc)
    set(${note} "nvcc was not found (a CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-cuda-cccl)" PARENT_SCOPE)
    return()
  endif()
  set(flags -std=c++17 -O3 -Xcompiler=-fPIC)
  foreach(arch IN LISTS DELTAFUSE_CUDA_ARCHS)
    if(NOT arch MATCHES "^[0-9]+[af]?$")
      message(FATAL_ERROR "DELTAFUSE_CUDA_ARCHS: '${arch}' is not an architecture such as 80 or 90a")
    endif()
    list(APPEND flags -gencode=arch=compute_${arch},code=sm_${arch})
  endforeach()
  separate_arguments(more UNIX_COMMAND "${DELTAFUSE_CUDA_FLAGS}")
  list(APPEND flags -ccbin=${CMAKE_CXX_COMPILER} ${more})

  # Where this nvcc has its files: "#$ TOP=..." in what it would run.
  set(try "${CMAKE_CURRENT_BINARY_DIR}/try_cuda")
  file(WRITE "${try}/try.cu" "#include <cuda_fp16.h>\n__global__ void k(half* p) { *p = __float2half(1.0f); }\n")
  execute_process(COMMAND "${nvcc}" --dryrun -c "${try}/try.cu" ERROR_VARIABLE plan OUTPUT_VARIABLE plan)
  string(REGEX MATCH "TOP=([^\n]*)" top "${plan}")
  get_filename_component(top "${CMAKE_MATCH_1}" ABSOLUTE)
  unset(cuda_include CACHE)
  unset(cudart CACHE)
  find_path(cuda_include cuda_runtime_api.h PATHS "${top}" PATH_SUFFIXES include targets/x86_64-linux/include
                                                                         targets/sbsa-linux/include)
  find_library(cudart libcudart_static.a PATHS "${top}" PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib
                                                                      targets/sbsa-linux/lib)
  set(why "")
  if(NOT cuda_include OR NOT cudart)
    set(why "${nvcc} has no cuda_runtime_api.h or no libcudart_static.a beside it")
  else()
    execute_process(
      COMMAND "${nvcc}" ${flags} -c "${try}/try.cu" -o "${try}/try.o"
      RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
    if(NOT failed EQUAL 0)
      string(STRIP "${said}" said)
      set(why "${nvcc} cannot compile for ${DELTAFUSE_CUDA_ARCHS}: ${said}")
    endif()
  endif()
  if(NOT why)
    message(STATUS "deltafuse: CUDA kernels for ${DELTAFUSE_CUDA_ARCHS} with ${nvcc}")
  endif()
  set(${note} "${why}" PARENT_SCOPE)
  set(df_nvcc "${nvcc}" PARENT_SCOPE)
  set(df_nvcc_flags "${flags}" PARENT_SCOPE)
  set(df_cuda_include "${cuda_include}" PARENT_SCOPE)
  set(df_cudart "${cudart}" PARENT_SCOPE)
  unset(cuda_include CACHE)
  unset(cudart CACHE)
endfunction()

# df_cuda_objects(OUT SOURCES...): one object for each .cu file.
function(df_cuda_objects out)
  set(objects "")
  foreach(source IN LISTS ARGN)
    file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}" "${source}")
    set(object "${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o")
    get_filename_component(folder "${object}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND "${df_nvcc}" ${df_nvcc_flags} -MD -MF "${object}.d" -c "${source}" -o "${object}"
      DEPENDS "${source}"
      DEPFILE "${object}.d"
      COMMENT "nvcc ${name}"
      VERBATIM)
    list(APPEND objects "${object}")
  endforeach()
  set(${out} "${objects}" PARENT_SCOPE)
endfunction()
