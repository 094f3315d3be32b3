/* SPDX-License-Identifier: Apache-2.0
 * Calls of a Java method in another process. Frames of a length and values, each behind a tag. */
class SporeloomRpc {
    static final int MAX_BYTES = 1 << 26;
    static final java.io.DataInputStream INPUT = new java.io.DataInputStream(System.in);
    static final java.io.DataOutputStream OUTPUT =
            new java.io.DataOutputStream(new java.io.BufferedOutputStream(System.out, 1 << 16));

    static {
        System.setOut(System.err); // what is printed does not go to the other process
        System.setIn(new java.io.ByteArrayInputStream(new byte[0]));
    }

    static void put(java.io.DataOutputStream out, Object value) throws java.io.IOException {
        if (value == null) out.writeByte('N');
        else if (value instanceof Boolean) { out.writeByte('Z'); out.writeBoolean((Boolean) value); }
        else if (value instanceof Byte) { out.writeByte('Y'); out.writeByte((Byte) value); }
        else if (value instanceof Short) { out.writeByte('H'); out.writeShort((Short) value); }
        else if (value instanceof Integer) { out.writeByte('I'); out.writeInt((Integer) value); }
        else if (value instanceof Long) { out.writeByte('J'); out.writeLong((Long) value); }
        else if (value instanceof Float) { out.writeByte('F'); out.writeFloat((Float) value); }
        else if (value instanceof Double) { out.writeByte('D'); out.writeDouble((Double) value); }
        else if (value instanceof Character) { out.writeByte('C'); out.writeChar((Character) value); }
        else if (value instanceof String) { out.writeByte('S'); putText(out, (String) value); }
        else if (value.getClass() == java.math.BigInteger.class) { out.writeByte('B'); putText(out, value.toString()); }
        else if (value.getClass() == java.math.BigDecimal.class) { out.writeByte('E'); putText(out, value.toString()); }
        else if (value instanceof java.util.Optional) {
            out.writeByte('O');
            put(out, ((java.util.Optional<?>) value).orElse(null));
        } else if (value instanceof java.util.List || value instanceof java.util.Set) {
            java.util.Collection<?> items = (java.util.Collection<?>) value;
            out.writeByte(value instanceof java.util.List ? 'L' : 'T');
            putAll(out, items.toArray());
        } else if (value instanceof java.util.Map) {
            java.util.List<Object> items = new java.util.ArrayList<>();
            for (java.util.Map.Entry<?, ?> entry : ((java.util.Map<?, ?>) value).entrySet()) {
                items.add(entry.getKey());
                items.add(entry.getValue());
            }
            out.writeByte('M');
            putAll(out, items.toArray());
        } else if (value.getClass().isArray()) {
            Object[] items = new Object[java.lang.reflect.Array.getLength(value)];
            for (int i = 0; i < items.length; i++) items[i] = java.lang.reflect.Array.get(value, i);
            out.writeByte('A');
            putText(out, value.getClass().getName());
            putAll(out, items);
        } else throw new IllegalArgumentException("a " + value.getClass().getName() + " cannot be passed on");
    }

    static void putText(java.io.DataOutputStream out, String text) throws java.io.IOException {
        out.writeInt(text.length());
        out.writeChars(text);
    }

    static void putAll(java.io.DataOutputStream out, Object[] items) throws java.io.IOException {
        out.writeInt(items.length);
        for (Object item : items) put(out, item);
    }

    static Object take(java.io.DataInputStream in) throws java.io.IOException {
        switch (in.readByte()) {
            case 'N': return null;
            case 'Z': return in.readBoolean();
            case 'Y': return in.readByte();
            case 'H': return in.readShort();
            case 'I': return in.readInt();
            case 'J': return in.readLong();
            case 'F': return (float) number(in.readFloat());
            case 'D': return number(in.readDouble());
            case 'C': return in.readChar();
            case 'S': return takeText(in).intern(); // as literals are: Java/137 compares with ==
            case 'B': return new java.math.BigInteger(takeText(in));
            case 'E': return new java.math.BigDecimal(takeText(in));
            case 'O': return java.util.Optional.ofNullable(take(in));
            case 'L': return takeAll(in);
            case 'T': return new java.util.LinkedHashSet<>(takeAll(in));
            case 'M': {
                java.util.Map<Object, Object> map = new java.util.LinkedHashMap<>();
                java.util.Iterator<Object> items = takeAll(in).iterator();
                while (items.hasNext()) map.put(items.next(), items.next());
                return map;
            }
            case 'A': return takeArray(in);
            default: throw new IllegalArgumentException("this is not a value");
        }
    }

    static double number(double value) {
        if (value != value) throw new IllegalArgumentException("NaN is no answer"); // it would pass `if (abs(a - b) > 1e-4) throw`
        return value;
    }

    static int takeLength(java.io.DataInputStream in) throws java.io.IOException {
        int length = in.readInt();
        if (length < 0 || length > in.available()) throw new IllegalArgumentException("a value is cut off");
        return length;
    }

    static String takeText(java.io.DataInputStream in) throws java.io.IOException {
        char[] text = new char[takeLength(in)];
        for (int i = 0; i < text.length; i++) text[i] = in.readChar();
        return new String(text);
    }

    static java.util.List<Object> takeAll(java.io.DataInputStream in) throws java.io.IOException {
        int length = takeLength(in);
        java.util.List<Object> items = new java.util.ArrayList<>(length);
        for (int i = 0; i < length; i++) items.add(take(in));
        return items;
    }

    static Object takeArray(java.io.DataInputStream in) throws java.io.IOException {
        String name = takeText(in);
        if (!name.matches("\\[+([ZBCSIJFD]|Ljava\\.(lang|util|math)\\.\\w+;)")) throw new IllegalArgumentException("this is not an array");
        java.util.List<Object> items = takeAll(in);
        try {
            Object array = java.lang.reflect.Array.newInstance(Class.forName(name).getComponentType(), items.size());
            for (int i = 0; i < items.size(); i++) java.lang.reflect.Array.set(array, i, items.get(i));
            return array;
        } catch (ClassNotFoundException error) {
            throw new IllegalArgumentException(error);
        }
    }

    static void send(Object... values) throws java.io.IOException {
        java.io.ByteArrayOutputStream frame = new java.io.ByteArrayOutputStream();
        java.io.DataOutputStream out = new java.io.DataOutputStream(frame);
        for (Object value : values) put(out, value);
        OUTPUT.writeInt(frame.size());
        frame.writeTo(OUTPUT);
        OUTPUT.flush();
    }

    /** The next frame; null once the other side has gone. */
    static java.io.DataInputStream receive() throws java.io.IOException {
        int length;
        try {
            length = INPUT.readInt();
        } catch (java.io.EOFException error) {
            return null;
        }
        if (length < 0 || length > MAX_BYTES) throw new IllegalArgumentException("a value is too large");
        return new java.io.DataInputStream(new java.io.ByteArrayInputStream(INPUT.readNBytes(length)));
    }

    /** What the tests call in the place of the solution's method; `type` is the declared one. */
    @SuppressWarnings("unchecked")
    static <T> T call(String name, String type, Object... values) {
        try {
            send(name, values);
            java.io.DataInputStream answer = receive();
            if (answer == null) throw new IllegalStateException("the solution ended before it answered");
            if (!(Boolean) take(answer)) throw new IllegalStateException("the solution failed: " + take(answer));
            return (T) fit(take(answer), type);
        } catch (java.io.IOException error) {
            throw new IllegalStateException("the solution ended before it answered");
        }
    }

    /** A number of another type as the declared one, where that loses nothing. */
    static Object fit(Object value, String type) {
        if (!(value instanceof Number)) return value;
        Number number = (Number) value;
        boolean isWhole = value instanceof Integer || value instanceof Long || value instanceof Short || value instanceof Byte;
        if (type.equals("int") && isWhole) return Math.toIntExact(number.longValue());
        if (type.equals("long") && isWhole) return number.longValue();
        if (type.equals("double") && (isWhole || value instanceof Float)) return number.doubleValue();
        if (type.equals("float") && isWhole) return number.floatValue();
        return value;
    }

    /** Answers calls until the tests end. */
    static void serve(Class<?> type) throws Exception {
        for (java.io.DataInputStream request = receive(); request != null; request = receive()) {
            Object answer;
            boolean isResult = false;
            try {
                String name = (String) take(request);
                Object[] values = (Object[]) take(request);
                answer = method(type, name, values).invoke(type.getDeclaredConstructor().newInstance(), values);
                send(true, answer);
                continue;
            } catch (java.lang.reflect.InvocationTargetException error) {
                error.getCause().printStackTrace();
                answer = String.valueOf(error.getCause());
            } catch (RuntimeException | StackOverflowError error) {
                answer = String.valueOf(error);
            }
            send(isResult, answer);
        }
    }

    static java.lang.reflect.Method method(Class<?> type, String name, Object[] values) {
        for (java.lang.reflect.Method method : type.getDeclaredMethods()) {
            Class<?>[] types = method.getParameterTypes();
            if (!method.getName().equals(name) || method.isSynthetic() || types.length != values.length) continue;
            boolean fits = true;
            for (int i = 0; i < types.length; i++) {
                Class<?> boxed = java.lang.invoke.MethodType.methodType(types[i]).wrap().returnType();
                boolean widens = types[i].isPrimitive() && values[i] instanceof Number && types[i] != int.class;
                fits &= values[i] == null ? !types[i].isPrimitive() : boxed.isInstance(values[i]) || widens;
            }
            if (fits) {
                method.setAccessible(true);
                return method;
            }
        }
        throw new IllegalArgumentException("there is no method " + name + " for these values");
    }

    /** The last thing the tests do. */
    static void finish() {
        System.err.println("\n" + System.getenv("SPORELOOM_NONCE"));
    }
}
